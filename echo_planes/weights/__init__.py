"""The wire between learning and rollout: digests, manifests, patches."""
