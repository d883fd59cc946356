"""The dialect of OpenAI's API: a body and a codec for each of its forms."""
