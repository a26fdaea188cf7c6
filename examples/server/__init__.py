"""A generation server in OpenAI's API: what may be asked, how it is answered, and the application."""
