"""The Serve application: ingress, replica deployments, their metrics, shard actors, and the Ray head that runs them.

Imports `service.supervision` and `service.warm_workers`, and `api`, `fleet`, `metrics`, `routing`, `security`,
`tracing` and `transport`. A new deployment is built in `serve_app`.
"""
