"""The life of a process: start, serve, drain, stop; logs; readiness; bound to its parent's life.

class Router:                                   # implements Service
    name = "router"
    async def start(self, life): ...            # enter adapters, spawn tasks, return the ports
    async def announce_drain(self): ...
    async def drain(self): ...
    async def abort(self): ...

sys.exit(run(build_router, config, telemetry=config.common.telemetry, ...))
"""
