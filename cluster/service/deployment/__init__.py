"""The Serve application: ingress, replica deployments, their metrics, shard actors, and the Ray head that runs them.

Imports `service.supervision` and `service.warm_workers`, and `api`, `fleet`, `routing`, `security` and `transport`. A
new deployment is built in `serve_app`; a new metric is a field with metadata, of a class that `metrics_table` names.
"""
