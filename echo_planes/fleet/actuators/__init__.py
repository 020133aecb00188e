"""Sources of machines: `actuator.Actuator` is the interface, `ray_nodes` Ray's autoscaler."""
