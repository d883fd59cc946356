"""The dialect of OpenAI's Responses: items in and items out, and nothing is kept."""
