"""Offline work on all operators: configs searched by measurement or predicted from compiled resources, tables written
and checked, the compile matrix and its page, timing of operators. Imports everything below (`compiler`, registry,
`launch`, `device`), and nothing that serves imports it but for measurements.
"""
