"""
Replicas on a Ray cluster: one process an engine, one rule that chooses among them.

    from pyllama_raw.replicas.cluster import cluster

    serve.run(cluster(Deployment.of(read("service.toml")), n_replicas=2))

It needs the extra `ray`. A front reads a request and calls a replica by handle, because a
proxy of Ray chooses before it has read the body, which tells the prefix.
"""
