"""gRPC: servers, channels, calls with deadlines, and errors mapped at the boundary."""
