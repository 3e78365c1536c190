"""One translator per protocol: wire <-> `Ask`, `StreamMessage`."""
