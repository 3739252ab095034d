"""Addresses of processes, as a configuration may make them."""

from __future__ import annotations

from hypothesis import strategies as st

from moonpool.config.values import host_port

#: host:port for any host: a name, or an IP address of either kind.
addresses = st.builds(
    host_port,
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True) | st.ip_addresses().map(str),
    st.integers(1, 65_535),
)
