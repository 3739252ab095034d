"""`moonpool doctor`: checks this machine for what a cluster needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moonpool.cli.doctor_checks import Finding, Severity, run_checks
from moonpool.cli.failure import EXIT_FAILED, EXIT_OK
from moonpool.cli.terminal import Glyphs, make_console, print_json
from moonpool.config.load import load_cluster_config

_STYLE_BY_SEVERITY = {
    Severity.OK: "green",
    Severity.INFO: "dim",
    Severity.WARNING: "yellow",
    Severity.ERROR: "red",
}


def run_doctor(
    *, file: Path | None, flags: Mapping[str, object], is_deep: bool, is_json: bool
) -> int:
    """Print each finding as it is made; 1 if one is an error.

    Raises:
        ConfigError: The configuration to check against is wrong itself.
    """
    config = load_cluster_config(file, environ=os.environ, flags=flags).config
    console = make_console()
    findings: list[Finding] = []
    for finding in run_checks(config, is_deep=is_deep):
        findings.append(finding)
        if not is_json:
            print_finding(finding, console)
    num_errors = sum(finding.severity is Severity.ERROR for finding in findings)
    if is_json:
        print_json(
            {"is_healthy": not num_errors, "findings": [asdict(finding) for finding in findings]}
        )
    else:
        console.print(f"\n{summary(findings)}", style="bold", soft_wrap=True)
    return EXIT_FAILED if num_errors else EXIT_OK


def print_finding(finding: Finding, console: Console) -> None:
    """A line for what was found; one more with the fix if there is one."""
    for line in finding_lines(finding, Glyphs.of(console)):
        console.print(Text(line, style=_STYLE_BY_SEVERITY[finding.severity]), soft_wrap=True)


def finding_lines(finding: Finding, glyphs: Glyphs) -> Iterator[str]:
    mark = {
        Severity.OK: glyphs.ok,
        Severity.INFO: glyphs.dot,
        Severity.WARNING: "!",
        Severity.ERROR: glyphs.bad,
    }[finding.severity]
    yield f"{mark} {finding.check:10} {finding.message}"
    if finding.fix:
        yield f"  {'':10} fix: {finding.fix}"


def summary(findings: Sequence[Finding]) -> str:
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    warnings = sum(finding.severity is Severity.WARNING for finding in findings)
    if not errors and not warnings:
        return "This machine can run the cluster."
    texts = [
        f"{count} {what}{'' if count == 1 else 's'}"
        for count, what in ((errors, "error"), (warnings, "warning"))
        if count
    ]
    verdict = "cannot run the cluster yet" if errors else "can run the cluster"
    return f"{', '.join(texts)}: this machine {verdict}."
