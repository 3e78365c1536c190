"""Says what a fleet is to be (`spec`), keeps what is deployed (`deployed`), holds it there (`control`), sizes it
(`scaling`) and prices it (`plan`). Imports `security`, `transport`, `routing`, `api`, `prefix_store` and
`simulation`; `service` imports it. A new module goes into one of its folders.
"""
