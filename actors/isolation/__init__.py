"""Backends in processes of their own: supervised workers, which a crash or a hang ends alone"""
