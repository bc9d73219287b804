"""The captured graph: capture, catalogue of operators, observation, q/dq insertion."""
