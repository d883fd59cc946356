"""The dialect of Anthropic's API: messages of blocks."""
