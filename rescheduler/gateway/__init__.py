"""An endpoint picker for Envoy gateways: the routing policies decide, the gateway forwards."""
