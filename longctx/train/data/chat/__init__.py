"""Conversations go through the chat template, and keep track of which characters are trained."""
