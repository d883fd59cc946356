"""Prompts and chats: from what users write to tokens."""
