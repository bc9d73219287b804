"""From a graph over padded texts to the same graph over the rows of their real tokens.

The graph is the same one, for one text that is as long as all together: what an encoder computes of each
token alone does not change by that. Attention is told which rows are of the same text, positions are those
that tokens have in their own text, and what is read of a text is read at its rows. `origins` proves that
nothing else depends on other tokens, `masks` what the mask does, and `rewrite` makes the graph.
"""
