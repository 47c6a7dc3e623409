"""placeholder"""
def draw_all(records, folder, machine):
    return []
