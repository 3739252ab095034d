"""The one cluster schema: a file, the environment and flags become one frozen, checked value.

    loaded = load_cluster_config(path, environ=os.environ, flags={"router.http_port": 9000})
    loaded.config.router.http_port, loaded.origins["router.http_port"]

Each process gets its own part of it (process.py) as one JSON document. pydantic is used here only.
"""
