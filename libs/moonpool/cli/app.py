"""Commands and flags. Nothing heavy is imported here: a command imports what it needs when it runs.

Each command returns its exit code. Flags are spelt as vLLM spells them where the concept exists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moonpool import __version__
from moonpool.cli.failure import EXIT_CODES, EXIT_OK, EXIT_USAGE

_EPILOG = "Exit codes: " + "; ".join(f"{code} {text}" for code, text in EXIT_CODES.items()) + "."

app = typer.Typer(
    name="moonpool",
    help="Serve language models with prefill and decode on separate workers.",
    epilog=_EPILOG,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="MOONPOOL_DATA_DIR",
        help="Where models, the cluster's secret and logs lie; default $MOONPOOL_HOME, else "
        "~/.local/share/moonpool.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
Address = Annotated[
    str | None,
    typer.Option(
        envvar="MOONPOOL_ADDRESS",
        help="host:port of the router's gRPC door; default: the cluster that `up` started last.",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="MOONPOOL_API_KEY", show_envvar=True, help="The door's key, if it has one."
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--file", "-f", help="A cluster file (TOML or YAML).")
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"moonpool {__version__}")
        raise typer.Exit(EXIT_OK)


@app.callback()
def root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve language models with prefill and decode on separate workers."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_USAGE)


demo_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(demo_app, name="demo")

DemoModelName = Annotated[
    str, typer.Option("--model", help="A name that `pull` knows, a directory, or a .gguf file.")
]
DemoDtype = Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")]
DemoTransports = Annotated[
    str | None, typer.Option("--transports", help="How KV is read, in order: shm,nixl,grpc.")
]


@demo_app.callback()
def demo(
    context: typer.Context,
    model: DemoModelName = "smollm2-135m",
    dtype: DemoDtype = "bfloat16",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 120,
    transports: DemoTransports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Answer a long prompt on two workers and show what happened.

    Pulls the model if it is not here, starts a cluster on free ports, and leaves nothing running.
    """
    if context.invoked_subcommand is not None:
        return EXIT_OK
    from moonpool.cli.demo import run_demo
    from moonpool.cli.demo_cluster import DemoModel

    served = DemoModel(model=model, dtype=dtype, transports=transports, data_dir=data_dir)
    return run_demo(served, max_tokens=max_tokens, is_json=as_json)


@demo_app.command("prefix")
def demo_prefix(
    model: DemoModelName = "smollm2-135m",
    dtype: DemoDtype = "bfloat16",
    prefix_tokens: Annotated[
        int, typer.Option(min=16, help="Tokens of a document; a multiple of 16.")
    ] = 6_144,
    question_tokens: Annotated[int, typer.Option(min=32, help="Tokens of a question.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Documents, one after another.")] = 3,
    transports: DemoTransports = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Ask about a long document: computed, read from a peer, found, read from a store.

    What a first token takes when the document's KV lies in the worker's own pool, when another worker
    holds it, when a store has it in memory or on its disk, and when nobody does.
    """
    from moonpool.cli.demo_asked import PrefixPlan
    from moonpool.cli.demo_cluster import DemoModel
    from moonpool.cli.demo_prefix import run_demo_prefix

    return run_demo_prefix(
        DemoModel(model=model, dtype=dtype, transports=transports, data_dir=data_dir),
        PrefixPlan(prefix_tokens=prefix_tokens, question_tokens=question_tokens, num_rounds=rounds),
        is_json=as_json,
    )


@app.command()
def up(
    file: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option(help="A name that `pull` knows, a directory, or a .gguf file.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="Prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="Decode workers.")] = None,
    stores: Annotated[
        int | None,
        typer.Option(min=0, help="Store nodes, which keep KV that workers have no room for."),
    ] = None,
    ssd: Annotated[
        Path | None, typer.Option(help="A directory on an SSD for what stores keep.")
    ] = None,
    ssd_size: Annotated[
        str | None, typer.Option(help="What each store may take of it, like 4GiB.")
    ] = None,
    ssd_write_per_day: Annotated[
        str | None, typer.Option(help="What each store may write in a day; 0: without a limit.")
    ] = None,
    ssd_strict: Annotated[
        bool | None, typer.Option("--ssd-strict", help="Never start a store without its SSD.")
    ] = None,
    host_size: Annotated[str | None, typer.Option(help="Memory of each store, like 1GiB.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    compute_dtype: Annotated[
        str | None, typer.Option(help="What is computed in; default: what this CPU does fast.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="int8: weights of 1 byte. Default: none.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="auto: as the model; fp8_e4m3: 1 byte a value, on GPUs.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of both doors; not loopback needs --api-key.")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "--http-port", help="HTTP door; 0 takes a free one.")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC door; 0 takes a free one.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name at the door.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + answer.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most requests in one step.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of one step.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="What workers compute on: cpu, cuda or cuda:1.")
    ] = None,
    allow_unverified: Annotated[
        bool | None,
        typer.Option("--allow-unverified", help="Take what has never run on its hardware."),
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a KV block.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of a worker's pool.")] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="Size of a worker's pool, like 512MiB.")
    ] = None,
    kv_eviction_policy: Annotated[
        str | None, typer.Option(help="Which cached block goes first: lru, s3_fifo or lfu_aged.")
    ] = None,
    local_prefill_tokens: Annotated[
        int | None, typer.Option(help="Uncached tokens that a decode worker prefills itself.")
    ] = None,
    layers_per_group: Annotated[
        int | None, typer.Option(help="Layers that a prefill announces at once.")
    ] = None,
    transports: Annotated[
        str | None, typer.Option(help="How KV is read, in order: shm,nixl,grpc.")
    ] = None,
    transport_strict: Annotated[
        bool | None, typer.Option("--transport-strict", help="Never fall back to a later one.")
    ] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict", help="Refuse unknown request fields.")
    ] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="Requests that may wait for a worker.")
    ] = None,
    request_timeout_s: Annotated[
        float | None, typer.Option(help="Deadline of a request that sets none.")
    ] = None,
    router_mode: Annotated[
        str | None,
        typer.Option(
            help="min_ttft, random, round_robin, least_loaded, prefix_affinity (SGLang's rule) or "
            "dynamo_linear (Dynamo's KV router)."
        ),
    ] = None,
    disagg_policy: Annotated[
        str | None,
        typer.Option(help="Local or remote prefill: measured, or threshold only."),
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="Time per token that decode workers may reach; 0: any.")
    ] = None,
    expected_output_tokens: Annotated[
        int | None, typer.Option(help="Tokens that an answer is expected to have.")
    ] = None,
    cache_threshold: Annotated[
        float | None, typer.Option(help="prefix_affinity: share of a prompt that must match.")
    ] = None,
    balance_abs_threshold: Annotated[
        int | None, typer.Option(help="prefix_affinity: requests out of balance, at least.")
    ] = None,
    balance_rel_threshold: Annotated[
        float | None, typer.Option(help="prefix_affinity: ratio out of balance, at least.")
    ] = None,
    kv_overlap_score_weight: Annotated[
        float | None, typer.Option(help="dynamo_linear: weight of a cached block.")
    ] = None,
    router_temperature: Annotated[
        float | None, typer.Option(help="dynamo_linear: 0 takes the best, more draws.")
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(help="A broker that runs elsewhere; default: start one.")
    ] = None,
    nats_port: Annotated[
        int | None, typer.Option(help="Port of the broker that is started; 0 takes a free one.")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="Send traces there, like http://127.0.0.1:4317.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, console or json.")] = None,
    name: Annotated[str | None, typer.Option(help="The cluster's name.")] = None,
    failpoints: Annotated[
        str | None, typer.Option(help="Break on purpose; needs --unsafe-failpoints.")
    ] = None,
    unsafe_failpoints: Annotated[
        bool | None, typer.Option("--unsafe-failpoints", help="Allow --failpoints.")
    ] = None,
    show_config: Annotated[
        bool,
        typer.Option("--show-config", help="Print each value and where it came from, and exit."),
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Start a cluster on this machine, until Ctrl-C.

    Ctrl-C drains it, a second one forces. Flags beat the environment (MOONPOOL_ROUTER__HTTP_PORT=9000),
    which beats the file.
    """
    from moonpool.cli.up import UpOptions, run_up

    flags: dict[str, object] = {
        "name": name,
        "data_dir": data_dir,
        "model": model,
        "dtype": dtype,
        "compute_dtype": compute_dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "local_prefill_tokens": local_prefill_tokens,
        "nats.url": nats_url,
        "nats.port": nats_port,
        "router.host": host,
        "router.http_port": port,
        "router.grpc_port": grpc_port,
        "router.api_key": api_key,
        "router.served_model_name": served_model_name,
        "router.is_strict": strict,
        "router.max_queued_requests": max_queued_requests,
        "router.request_timeout_s": request_timeout_s,
        "router.placement.mode": router_mode,
        "router.placement.disagg": disagg_policy,
        "router.placement.slo_tpot_ms": slo_tpot_ms,
        "router.placement.expected_output_tokens": expected_output_tokens,
        "router.placement.cache_threshold": cache_threshold,
        "router.placement.balance_abs_threshold": balance_abs_threshold,
        "router.placement.balance_rel_threshold": balance_rel_threshold,
        "router.placement.kv_overlap_score_weight": kv_overlap_score_weight,
        "router.placement.router_temperature": router_temperature,
        "worker.device": device,
        "worker.allow_unverified": allow_unverified,
        "worker.block_size": block_size,
        "worker.num_blocks": num_blocks,
        "worker.kv_cache_memory_bytes": kv_cache_memory_bytes,
        "worker.kv_eviction_policy": kv_eviction_policy,
        "worker.max_num_batched_tokens": max_num_batched_tokens,
        "worker.max_num_seqs": max_num_seqs,
        "worker.max_model_len": max_model_len,
        "worker.layers_per_group": layers_per_group,
        "worker.transports": transports,
        "worker.is_transport_strict": transport_strict,
        "store.host_bytes": host_size,
        "store.ssd_dir": ssd,
        "store.ssd_bytes": ssd_size,
        "store.ssd_write_bytes_per_day": ssd_write_per_day,
        "store.is_ssd_strict": ssd_strict,
        "telemetry.otlp_traces_endpoint": otlp_traces_endpoint,
        "telemetry.log_level": log_level,
        "telemetry.log_format": log_format,
        "failpoints": failpoints,
        "unsafe_failpoints": unsafe_failpoints,
    }
    return run_up(
        UpOptions(
            file=file,
            flags=flags,
            num_prefill=prefill,
            num_decode=decode,
            num_stores=stores,
            only_shows_config=show_config,
        ),
        is_json=as_json,
    )


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Argument(help="One question; without it a conversation begins.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None,
    seed: Annotated[int | None, typer.Option(help="For an answer that can be repeated.")] = None,
    address: Address = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Ask a running cluster: once, or in a conversation."""
    from moonpool.cli.chat import ChatOptions, run_chat
    from moonpool.cli.target import find_target

    return run_chat(
        ChatOptions(
            message=message,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        ),
        target=find_target(address=address, api_key=api_key, data_dir=data_dir),
        is_json=as_json,
    )


@app.command()
def status(
    address: Address = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Show who is there, how loaded, and what workers hold."""
    from moonpool.cli.status import run_status
    from moonpool.cli.target import find_target

    target = find_target(address=address, api_key=api_key, data_dir=data_dir)
    return run_status(target, is_json=as_json)


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="As chat, demo and answers name it.")],
    address: Address = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Show one request as a waterfall over all processes."""
    from moonpool.cli.target import find_target
    from moonpool.cli.trace import run_trace

    target = find_target(address=address, api_key=api_key, data_dir=data_dir)
    return run_trace(request_id, target, is_json=as_json)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="As chat, demo and answers name it.")],
    address: Address = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Show why one request went where: every term of every candidate."""
    from moonpool.cli.explain import run_explain
    from moonpool.cli.target import find_target

    target = find_target(address=address, api_key=api_key, data_dir=data_dir)
    return run_explain(request_id, target, is_json=as_json)


cache_app = typer.Typer(
    help="Show what is reused, and why the rest is not.",
    rich_markup_mode=None,
)
app.add_typer(cache_app, name="cache")


@cache_app.command("stats")
def cache_stats(
    address: Address = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Show hits by source, misses by reason, and the ceiling."""
    from moonpool.cli.cache import run_cache_stats
    from moonpool.cli.target import find_target

    target = find_target(address=address, api_key=api_key, data_dir=data_dir)
    return run_cache_stats(target, is_json=as_json)


@cache_app.command("clear")
def cache_clear(
    worker: Annotated[str | None, typer.Option(help="Only this worker's cache.")] = None,
    address: Address = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Have workers forget every cached block that no request uses."""
    from moonpool.cli.cache import run_cache_clear
    from moonpool.cli.target import find_target

    target = find_target(address=address, api_key=api_key, data_dir=data_dir)
    return run_cache_clear(target, worker_id=worker, is_json=as_json)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A known model, like smollm2-135m.")],
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Bring a model to this machine, verified, once."""
    from moonpool.cli.pull import run_pull

    return run_pull(name, data_dir=data_dir, is_json=as_json)


@app.command(
    # Its flags, --help included, are the module's own.
    add_help_option=False,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def bench(context: typer.Context) -> int:
    """Put load on a server and measure what its clients see."""
    from moonpool.cli.bench import run_bench

    return run_bench(context.args)


@app.command()
def doctor(
    file: ConfigFile = None,
    model: Annotated[str | None, typer.Option(help="Check this model's files.")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Hash the model's files too.")] = False,
    ssd: Annotated[
        Path | None, typer.Option(help="Check this directory as what stores write to.")
    ] = None,
    ssd_size: Annotated[str | None, typer.Option(help="What each store may take of it.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Check that workers can compute on this: cuda, cuda:1.")
    ] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> int:
    """Check this machine and say how to mend it."""
    from moonpool.cli.doctor import run_doctor

    flags = {
        "model": model,
        "data_dir": data_dir,
        "store.ssd_dir": ssd,
        "store.ssd_bytes": ssd_size,
        "worker.device": device,
        # Checking it is no risk.
        "worker.allow_unverified": True if device else None,
    }
    return run_doctor(file=file, flags=flags, is_deep=deep, is_json=as_json)


@app.command()
def version(as_json: Json = False) -> int:
    """Print what runs here, in which version."""
    from moonpool.cli.version import run_version

    return run_version(is_json=as_json)
