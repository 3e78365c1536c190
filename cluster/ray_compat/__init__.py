"""Private parts of Ray that Motley needs: modules, attributes, settings, files and texts that a release may change.

Each is here once, as a function, class or constant that is named by what Motley needs it for, and no other module names
one (tests/test_ray_private.py). What breaks in Motley when Ray changes a part is said by its test in
tests/cluster/test_ray_compat*.py; run these on a new release of Ray before the range in pyproject.toml is widened. They
pass on Ray 2.60.0, the newest release there is, and fail on 2.59.0 and 2.58.1 (docs/contribute/map.md).

Where the next part goes: a variable that Ray reads into `environment`; a title, a path, a file or an error text into
`visible_names`; this process's node and worker into `local_node`; what the cluster knows into `cluster_state`; Serve's
controller, its applications, its handles and routers into `serve_controller`, `serve_deployments` and `serve_handles`;
the ports of its proxies and replicas into `serve_servers` and `replica_port`; HAProxy's configuration and its manager
into `haproxy_template` and `haproxy_control`.

Imports nothing of Motley. Ray itself is imported inside functions, except by `serve_servers`, `replica_port` and
`haproxy_control`, which replace names in modules of Serve: whoever needs these three imports them late.
"""
