"""What the engine process and its service process say to each other, as values (see engine_frames.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.core.config import CoreConfig, Quantization
from moonpool.core.protocol import (
    Command,
    CoreFrame,
)
from moonpool.kv.block_hash import ModelNamespace
from moonpool.kv.layout import KvDtype, KvLayout
from moonpool.latency.step_shape import StepShape


class EngineFrameError(RuntimeError):
    """The bytes are not a frame of ours: a bug, since both ends are ours."""


class FrameTooLongError(EngineFrameError):
    """What is to be sent does not fit into one frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBoot:
    """All that an engine process needs to know; its descriptors are inherited under these numbers."""

    worker_id: str
    incarnation: str
    #: Directory of the model's files (resolved by hub/ in the service process).
    model_path: str
    model_name: str
    data_dir: str
    dtype: KvDtype
    #: What its arithmetic is done in; at least as wide.
    compute_dtype: KvDtype
    quantization: Quantization = "none"
    #: `cpu`, or as torch names a GPU.
    device: str = "cpu"
    layout: KvLayout
    core: CoreConfig
    #: With a request's tenant, salt and adapter: what seeds its block hash chain.
    namespace: ModelNamespace
    #: The cluster's secret, which keys the seeds.
    secret: bytes = field(repr=False)
    pool_fd: int
    leaves_fd: int
    control_fd: int
    #: eventfd that tells the service of finished layers (memory.WorkerMemory.bell).
    bell_fd: int
    #: Socket by which peers' device memory is read (device_frames.py); -1 for none.
    device_fd: int = -1
    #: The bell rings after every so many layers, and after the last.
    layer_group: int
    #: CPUs this process is bound to; empty for no binding.
    cpu_affinity: tuple[int, ...] = ()
    num_threads: int = 1
    #: Failpoints of the engine's places (see failpoints/); empty in production.
    failpoints: str = ""
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMapped:
    """The engine mapped its memory writable; later writable maps may be forbidden."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The model is loaded and warm."""

    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFailed:
    """The engine cannot start. `message` is for the operator."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommands:
    """Commands for the core, in order."""

    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFrame:
    """A frame of the core, and when what it tells of happened, by the host's wall clock."""

    frame: CoreFrame
    #: When the frame was made: its plan runs from then on.
    planned_unix_ns: int = 0
    #: When the last layer's KV of the step before could be read, and when that step's tokens were
    #: drawn; 0 if there was none.
    last_layer_unix_ns: int = 0
    computed_unix_ns: int = 0
    #: What that step computed.
    shape: StepShape = field(default_factory=StepShape)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """Frames of the core, in order. Every step but the last one's plan has been computed whole."""

    frames: tuple[TimedFrame, ...]


ToEngine = EngineBoot | EngineCommands
FromEngine = EngineMapped | EngineReady | EngineFailed | EngineSteps
