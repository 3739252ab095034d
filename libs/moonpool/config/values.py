"""Value types of the schema: sizes, CPU lists, hosts, names of tenants."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, StringConstraints

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
#: The kernel's own limit.
MAX_CPUS = 4_096
_NO_CPU_LIST = "allowed is a list of CPU numbers and ascending ranges, like 0-2,5"
_CREDENTIALS = re.compile(r"//[^/@\s,]*@")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
#: As wire/fields.py takes a name.
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,255}")


def parse_size(value: object) -> object:
    """`"512MiB"` -> 536870912. K, M, G are binary as KiB, MiB, GiB; KB, MB, GB are decimal.

    Raises:
        ValueError: Not a size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            "allowed is a number of bytes with an optional unit, like 512MiB or 1.5GiB"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_size(size_bytes: int) -> str:
    """The shortest exact spelling: 536870912 -> `512MiB`."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def parse_cpus(value: object) -> object:
    """`"0-2,5"` -> (0, 1, 2, 5). A list passes as it is.

    Raises:
        ValueError: Not a CPU list.
    """
    if not isinstance(value, str):
        return value
    cpus: list[int] = []
    for part in filter(None, (part.strip() for part in value.split(","))):
        low, dash, high = part.partition("-")
        numbers = (low, high) if dash else (low, low)
        if not all(number.isdecimal() for number in numbers):
            raise ValueError(_NO_CPU_LIST)
        first, last = map(int, numbers)
        if not first <= last < MAX_CPUS:
            raise ValueError(f"{_NO_CPU_LIST}, numbers below {MAX_CPUS}")
        cpus.extend(range(first, last + 1))
    return tuple(cpus)


def without_credentials(text: str) -> str:
    """The text with `...` for whatever stands before the host of a URL in it."""
    return _CREDENTIALS.sub("//...@", text)


def plain_host(value: str) -> str:
    """`[::1]` -> `::1`: brackets belong to an address with a port.

    Raises:
        ValueError: Colons or brackets, but no IPv6 address.
    """
    if not any(sign in value for sign in ":[]"):
        return value
    host = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError("allowed is a name or an IP address, without a port") from None
    return host


def tenant_name(value: str) -> str:
    """The name as it is.

    Raises:
        ValueError: It could not travel with a request.
    """
    if not _TENANT.fullmatch(value):
        raise ValueError(
            "allowed are 1 to 256 letters, digits and . _ : / @ -, the first a letter or digit"
        )
    return value


def host_port(host: str, port: int) -> str:
    """What peers dial and URLs contain: `10.0.0.1:80`, `[::1]:80`. The host may have its brackets already."""
    plain = host.strip("[]")
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """True if `host` means every address of this machine, which no peer can dial."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


#: As it is bound: no brackets, no port.
Host = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9.:_\[\]-]+$"),
    AfterValidator(plain_host),
]
#: As it is dialled: host:port, an IPv6 address in brackets.
Address = Annotated[
    str,
    StringConstraints(max_length=260, pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$"),
]
#: Whose requests are: part of the block keys, and whose quota in stores.
TenantName = Annotated[str, AfterValidator(tenant_name)]
#: What an engine computes on: `cpu`, `cuda`, or one of several GPUs, `cuda:1`.
DeviceName = Annotated[str, StringConstraints(pattern=r"^(cpu|cuda(:\d{1,2})?)$")]
SizeBytes = Annotated[int, BeforeValidator(parse_size)]
CpuList = Annotated[tuple[int, ...], BeforeValidator(parse_cpus)]
