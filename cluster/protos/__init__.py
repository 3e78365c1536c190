"""The wire: `.proto` files with their generated code. `make protos` writes it again."""
