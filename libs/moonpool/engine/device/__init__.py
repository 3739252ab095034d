"""The engine on a device with memory of its own: a GPU, and torch's CPU where tests look at the rest.

runner       DeviceRunner: a step, from plan to result
tables       a step's arrays on the device, one copy per step
model        the Llama family over what kernels a device has
kernels      those kernels: the interface, and plain torch
flashinfer   FlashInfer's, and its attention; the only file that imports flashinfer
attention    attention by torch, where FlashInfer is missing
sampling     the sampler's draw, on the device
pool         the pool in the device's memory, HND blocks
staging      between that pool and the one in host memory, which peers read
ipc          memory of this GPU that other processes map, and theirs
peer_reads   blocks out of peers' pools on this GPU, beside the steps
held         which blocks came that way and need not come in from host memory
streams      order of work on a device, and on a side stream
graphs       a whole decode step as one piece of work
recording    such a piece: a CUDA graph, or the function itself on a CPU
"""
