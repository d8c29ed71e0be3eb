"""Uploads: checked before any arithmetic, decoded, combined into a reply."""
