"""Between bytes and domain values: protobuf, engine frames and OpenAI JSON, checked on the way in.

The domain knows no wire format and no message class leaves this package, `rpc` and `client`. What a
peer sent is judged here: a message that does not fit raises InvalidMessageError naming the field;
nothing a peer can send raises anything else.
"""
