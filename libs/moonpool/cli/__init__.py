"""The command line: `moonpool up`, `demo`, `chat`, `status`, `trace`, `bench`, `pull`,
`doctor` and `version`.

app.py names commands and flags and nothing else, so that `moonpool --help` is quick: what a command
needs is imported when it runs. Files whose names end in `_view` turn values into something to print
and ask nobody.
"""
