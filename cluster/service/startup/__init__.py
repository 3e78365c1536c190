"""Steps of `motley serve` before and after Ray runs: checks of options, settings of Ray's processes, joining a cluster,
applying a changed fleet, the message when ready. Imports the other folders of `service`, and `api`, `fleet`,
`prefix_store`, `routing`, `security`, `tracing` and `transport`. A new check at start goes here, and is called in
`serve_command.check`.
"""
