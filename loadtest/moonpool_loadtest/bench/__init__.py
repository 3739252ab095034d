"""The core of `moonpool bench`: open-loop load on a server, and what its clients saw.

    python -m moonpool_loadtest.bench --request-rate 4 --num-prompts 200 --input-len 512 --output-len 64

Requests are sent when their schedule says so, whether or not earlier ones were answered, and the time to
the first token counts from the schedule: a client that falls behind shows as latency, and as a send lag
of its own. Every number comes with whether the client itself was healthy enough to measure it.
"""
