"""Parity: do two engines compute the same, tensor by tensor?"""
