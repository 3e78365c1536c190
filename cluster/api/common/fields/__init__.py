"""Tables and schemas of request fields, those of other servers included, and the strict reading of JSON bodies.

Imports `api.common` and `transport.http_server.openapi`. A new field is a row of `field_table`; another server's goes
into `foreign_fields`.
"""
