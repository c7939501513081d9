//! The options after `?` in an export's address, joined by `&`.

/// The options that were not taken yet.
pub struct Options<'a>(Vec<&'a str>);

impl<'a> Options<'a> {
    /// Parses the options. The error names an option that occurs twice.
    pub fn parse(words: &'a str) -> Result<Options<'a>, String> {
        let words: Vec<&str> = words.split('&').filter(|word| !word.is_empty()).collect();
        let name = |word: &'a str| word.split('=').next();
        for (at, word) in words.iter().enumerate() {
            if words[..at].iter().any(|other| name(other) == name(word)) {
                return Err(format!("has {:?} twice", name(word).unwrap_or(word)));
            }
        }
        Ok(Options(words))
    }

    /// Takes the value of `name=VALUE`, if it is there.
    pub fn take(&mut self, name: &str) -> Option<&'a str> {
        let value = |word: &&'a str| word.strip_prefix(name)?.strip_prefix('=');
        let at = self.0.iter().position(|word| value(word).is_some())?;
        value(&self.0.remove(at))
    }

    /// Takes the option `name`. Returns whether it was there.
    pub fn take_flag(&mut self, name: &str) -> bool {
        let count = self.0.len();
        self.0.retain(|word| *word != name);
        self.0.len() < count
    }

    /// Returns an error if an option is left. `known` lists the valid options.
    pub fn end(self, known: &str) -> Result<(), String> {
        match self.0.first() {
            None => Ok(()),
            Some(word) => Err(format!("has the unknown option {word:?}: {known}")),
        }
    }
}
