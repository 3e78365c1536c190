"""Speaks each protocol: parses its requests into `ParsedRequest`, writes its responses from `CollectedResponse` or the
router's stream. Imports `metrics`, `routing`, `transport` and `security`. A new protocol is a new folder with a
protocol class, its routes or RPCs, and no import of another protocol; what several share goes into `common`.
"""
