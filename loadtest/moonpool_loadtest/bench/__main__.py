"""`python -m moonpool_loadtest.bench`, which is `moonpool bench`."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moonpool.cli.failure import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, exit_code_of
from moonpool.cli.target import find_target
from moonpool.errors import ConfigError, InvalidRequestError, MoonpoolError
from moonpool_loadtest.bench.arrivals import ArrivalKind, ArrivalProcess
from moonpool_loadtest.bench.benchmark import BenchConfig, run_benchmark
from moonpool_loadtest.bench.driver import RequestOptions
from moonpool_loadtest.bench.metrics import Slo
from moonpool_loadtest.bench.records import Outcome
from moonpool_loadtest.bench.report import to_document, to_table
from moonpool_loadtest.bench.workload import Lengths, PromptKind, WorkloadSpec

_ADDRESS_ENV = "MOONPOOL_ADDRESS"
_API_KEY_ENV = "MOONPOOL_API_KEY"
_SECRET_FLAG = "--api-key"


def main(arguments: Sequence[str] | None = None, *, prog: str = "moonpool bench") -> int:
    """Run one benchmark; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(prog).parse_args(given)
    try:
        config, api_key = _config(options)
        result = asyncio.run(
            run_benchmark(
                config,
                api_key=api_key,
                on_progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
        )
    except MoonpoolError as error:
        sys.stderr.write(f"{prog}: {error.message}\n")
        return exit_code_of(error)
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{prog}: interrupted\n")
        return EXIT_INTERRUPTED
    document = to_document(
        result, command=[prog, *_without_secrets(given)], has_records=not options.no_records
    )
    if options.output is not None:
        options.output.write_text(json.dumps(document) + "\n")
    print(json.dumps(document) if options.json else to_table(result))
    if result.metrics.num_by_outcome[Outcome.OK] == 0:
        return EXIT_FAILED
    return EXIT_FAILED if options.require_gates and not result.is_client_healthy else EXIT_OK


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Open-loop load on a server: TTFT from the schedule, every gap, goodput.",
        epilog="Lengths are N, LOW:HIGH (uniform) or lognormal:MEAN:CV.",
        allow_abbrev=False,
    )
    target = parser.add_argument_group("target")
    where = target.add_mutually_exclusive_group()
    where.add_argument(
        "--address", help="host:port of a gRPC door; default: the cluster that `up` started last"
    )
    where.add_argument(
        "--base-url", help="an OpenAI server (vLLM, SGLang, llama.cpp ...): http://host:port/v1"
    )
    target.add_argument(_SECRET_FLAG, default=os.environ.get(_API_KEY_ENV), help="the door's key")
    target.add_argument("--data-dir", type=Path, help="where `up` keeps its clusters")
    target.add_argument("--model", default="", help="default: the one that is served")
    target.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="chat sends each text as one user message",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate", type=_positive, default=1.0, help="requests per second; inf: at once"
    )
    load.add_argument(
        "--arrivals", type=ArrivalKind, choices=list(ArrivalKind), default=ArrivalKind.POISSON
    )
    load.add_argument(
        "--burstiness",
        type=_positive,
        help="shape of gamma gaps, whose CV is 1/sqrt(burstiness); implies --arrivals gamma",
    )
    amount = load.add_mutually_exclusive_group()
    amount.add_argument("--num-prompts", type=_count, help="default 100")
    amount.add_argument("--duration-s", type=_positive, help="rate times this, in requests")
    load.add_argument("--num-warmups", type=_count, default=2)
    load.add_argument("--seed", type=int, default=0)
    load.add_argument("--timeout-s", type=_positive, default=300.0, help="of one request")
    prompts = parser.add_argument_group("prompts and answers")
    prompts.add_argument(
        "--prompt", type=PromptKind, choices=list(PromptKind), default=PromptKind.WORDS
    )
    prompts.add_argument("--vocab-size", type=_count, help="for --prompt tokens")
    prompts.add_argument("--input-len", type=_lengths, default=Lengths.parse("128"))
    prompts.add_argument("--output-len", type=_lengths, default=Lengths.parse("32"))
    prompts.add_argument("--prefix-len", type=_count, default=0, help="shared, before each prompt")
    prompts.add_argument("--num-prefixes", type=_count, default=1)
    prompts.add_argument("--temperature", type=float, default=0.0)
    prompts.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="exact lengths"
    )
    slo = parser.add_argument_group("service level")
    slo.add_argument("--slo-ttft-ms", type=_positive)
    slo.add_argument("--slo-gap-ms", type=_positive, help="for every gap of an answer")
    slo.add_argument("--slo-tpot-ms", type=_positive)
    output = parser.add_argument_group("output")
    output.add_argument("--output", type=Path, help="write the JSON document there")
    output.add_argument("--json", action="store_true", help="print it instead of the table")
    output.add_argument("--no-records", action="store_true", help="leave single requests out of it")
    output.add_argument(
        "--require-gates", action="store_true", help="exit 1 if the client could not keep up"
    )
    return parser


def _config(options: argparse.Namespace) -> tuple[BenchConfig, str | None]:
    """The configuration and the key. Raises MoonpoolError for what does not fit together."""
    rate_rps: float = options.request_rate
    if options.duration_s is None:
        num_requests = 100 if options.num_prompts is None else options.num_prompts
    elif math.isinf(rate_rps):
        raise ConfigError("--duration-s needs a finite --request-rate")
    else:
        num_requests = max(round(options.duration_s * rate_rps), 1)
    if options.num_prefixes < 1:
        raise ConfigError("--num-prefixes must be at least 1")
    kind = options.arrivals if options.burstiness is None else ArrivalKind.GAMMA
    target, api_key = options.base_url, options.api_key
    if target is None:
        found = find_target(
            address=options.address or os.environ.get(_ADDRESS_ENV),
            api_key=api_key,
            data_dir=options.data_dir,
        )
        target, api_key = found.address, found.api_key
    config = BenchConfig(
        target=target,
        num_requests=num_requests,
        seed=options.seed,
        num_warmups=options.num_warmups,
        arrivals=ArrivalProcess(kind=kind, rate_rps=rate_rps, burstiness=options.burstiness or 1.0),
        workload=WorkloadSpec(
            kind=options.prompt,
            input_lengths=options.input_len,
            output_lengths=options.output_len,
            prefix_length=options.prefix_len,
            num_prefixes=options.num_prefixes,
            vocab_size=options.vocab_size,
        ),
        options=RequestOptions(
            model=options.model,
            is_chat=options.endpoint == "chat",
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            timeout_s=options.timeout_s,
        ),
        slo=Slo(
            ttft_ms=options.slo_ttft_ms, gap_ms=options.slo_gap_ms, tpot_ms=options.slo_tpot_ms
        ),
    )
    return config, api_key


def _without_secrets(arguments: Sequence[str]) -> list[str]:
    """What may be kept: the key's value is not."""
    kept: list[str] = []
    is_secret = False
    for argument in arguments:
        if is_secret:
            argument = "***"
        elif argument.startswith(f"{_SECRET_FLAG}="):
            argument = f"{_SECRET_FLAG}=***"
        is_secret = argument == _SECRET_FLAG
        kept.append(argument)
    return kept


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(error.message) from None


if __name__ == "__main__":
    sys.exit(main())
