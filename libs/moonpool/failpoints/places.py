"""Every place, with what its value is. A name that is not here is refused, so that a typo is seen."""

from __future__ import annotations

PLACES = {
    "engine.before_frame": "engine: the frame of a step is about to leave",
    "engine.after_step": "engine: the model has run a step",
    "prefill.after_layer": "engine: a layer of a step with a prompt is readable; value: the layer",
    "prefill.before_open": "prefill service: a handoff stream has arrived",
    "prefill.before_commit": "prefill service: the commit is about to be sent",
    "prefill.after_commit": "prefill service: the commit has been sent",
    "decode.after_reserve": "decode service: blocks are reserved, the handoff stream not yet open",
    "decode.after_read": "decode service: a read has ended; value: how many of this attempt",
    "decode.before_admit": "decode service: all KV has arrived, the request is not yet admitted",
    "decode.after_token": "decode service: tokens of a request leave; value: the last position",
    "transport.read": "reader: a read begins; flip: a byte of each leaf comes wrong, drop: the read fails",
    "fetch.before_open": "reader: a prefix is about to be read from a peer, its lease not yet open",
    "fetch.read": "reader: a read of a prefix begins; as transport.read, also delay:MS, and limit:N: "
    "such reads together bring N bytes a second",
    "fetch.after_read": "reader: a read of a prefix has ended; value: how many of this attempt",
    "hold.before_opened": "holder: a prefix is locked, its reader not told; delay:MS holds that back",
    "hold.after_opened": "holder: the reader of a prefix has been told",
    "store.load": "store: blocks are about to be read from the disk; delay:MS holds that back, limit:N: "
    "such loads together bring N bytes a second",
    "store.before_write": "store: blocks are about to be written to the disk",
    "store.after_write": "store: blocks lie on the disk, nobody has been told",
    "kv.publish": "worker service: a change of its cache is about to leave for the bus; drop: it is lost",
    "kv.before_snapshot": "worker service: a router has asked what the cache holds, nothing is sent",
    "router.before_dispatch": "router: an attempt is placed, nothing is sent",
    "router.after_token": "router: tokens of a request have come; value: the last position",
}

#: Actions that a place carries out itself; a rule that names another one there is refused.
ACTIONS_BY_PLACE = {
    "transport.read": ("flip", "drop"),
    "fetch.read": ("flip", "drop", "delay", "limit"),
    "hold.before_opened": ("delay",),
    "store.load": ("delay", "limit"),
    "kv.publish": ("drop",),
}
