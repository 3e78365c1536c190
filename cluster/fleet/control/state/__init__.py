"""Holds what the control plane has decided, how that changes, and how it is kept in Ray's GCS.

Decisions are pure; imports `routing.fleet_status` for types, and no other folder of `control`. A new decision is a
function of `decisions`, a new kept fact a field with a default in `control_state`.
"""
