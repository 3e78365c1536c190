"""Writes the dashboards of deploy/grafana/ from tables of panels: `make dashboards`."""
