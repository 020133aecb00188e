"""Where machines come from: `actuator.Actuator` is the interface, `ray_nodes` Ray's autoscaler."""
