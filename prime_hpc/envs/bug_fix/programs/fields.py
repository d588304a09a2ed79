"""Lines of fields."""


def split(line):
    """Fields of a line: between commas, where quotes protect commas; a doubled quote within quotes is a quote."""
    fields, field, quoted, i = [], "", False, 0
    while i < len(line):
        if quoted and line[i : i + 2] == '""':
            field, i = field + '"', i + 1
        elif line[i] == '"':
            quoted = not quoted
        elif line[i] == "," and not quoted:
            fields, field = [*fields, field], ""
        else:
            field += line[i]
        i += 1
    return [*fields, field]
