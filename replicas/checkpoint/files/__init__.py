"""The files of a checkpoint one by one: the folder, JSON, safetensors headers, the hub, checksums, and formats that are
refused by name. Reads no tensor, and imports no other folder but host. The next file format to recognise goes here (to
refuse one: a line in unsupported_formats).
"""
