class Editor:
    def __init__(self):
        self.text = ""
        self.before = []

    def insert(self, place, text):
        self.before.append(self.text)
        self.text = self.text[:place] + text + self.text[place:]

    def undo(self):
        self.text = self.before[-1]
