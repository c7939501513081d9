//! Text in columns: lists with headings, and pairs of a name and its value.

/// A cell longer than this pushes what follows instead of widening its column.
const CELL_CHARS_MAX: usize = 28;

/// A list with headings. Columns are as wide as their widest ordinary cell; the last is not
/// padded.
#[derive(Debug)]
pub struct Columns {
    rows: Vec<Vec<String>>,
}

impl Columns {
    /// A list with these headings.
    pub fn new(headings: &[&str]) -> Columns {
        Columns { rows: vec![headings.iter().map(|&heading| heading.to_owned()).collect()] }
    }

    /// Adds a row; it has as many cells as there are headings.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.rows[0].len(), "a cell for each heading");
        self.rows.push(cells);
    }

    /// Whether it has only the headings.
    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    /// The list as text, with a newline after each row.
    pub fn text(&self) -> String {
        align(&self.rows, "  ")
    }
}

/// `name: value` lines with the values under each other.
pub fn pairs<N: AsRef<str>>(pairs: &[(N, String)]) -> String {
    let rows: Vec<Vec<String>> = pairs
        .iter()
        .map(|(name, value)| vec![format!("{}:", name.as_ref()), value.clone()])
        .collect();
    align(&rows, " ")
}

fn align(rows: &[Vec<String>], gap: &str) -> String {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            let chars = cell.chars().count();
            if chars <= CELL_CHARS_MAX {
                *width = (*width).max(chars);
            }
        }
    }
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, &width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.chars().count())));
            line.push_str(gap);
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stand_under_each_other() {
        let mut list = Columns::new(&["NAME", "SIZE"]);
        list.row(vec!["a".into(), "1.0 MiB".into()]);
        list.row(vec!["longer".into(), "2".into()]);
        assert_eq!(list.text(), "NAME    SIZE\na       1.0 MiB\nlonger  2\n");
        assert_eq!(pairs(&[("a", "1".into()), ("bcd", "2".into())]), "a:   1\nbcd: 2\n");
    }
}
