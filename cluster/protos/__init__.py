"""The wire: `.proto` files with their generated code. `make protos` writes it again. Imports nothing of Motley. A new
service is a new file in the folder's `motley` package.
"""
