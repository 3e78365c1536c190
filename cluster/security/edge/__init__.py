"""Configures, starts and watches HAProxy in front of the ingress, and closes what Ray Serve opens by itself.

Imports `security.auth`. A new edit of HAProxy's configuration goes into `haproxy_config`, a new patch of Serve into
`serve_patches`.
"""
