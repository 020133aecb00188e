"""The learning plane: objectives, token packing and the DeepSpeed learner."""
