"""What watches a deployment: Grafana dashboards, and Prometheus' configuration and alerts."""
