"""What a capture has landed, as decoded changes: which files come next, and which rows count.

Exports to files and tables that are kept up to date read the same way: they plan some units
(`units`), go through their frames, and take the changes that count (`changes`).
"""
