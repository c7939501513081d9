//! Flamegraphs as SVG: a box for each function, above its caller, whose width is its share of all
//! samples. No script runs in them: a tooltip shows a box's whole name, and paper its beginning.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::results::Flame;
use crate::svg::escape;

const WIDTH: f64 = 960.0;
const ROW: f64 = 15.0;
const TOP: f64 = 26.0;
/// Boxes that are narrower are not drawn.
const NARROWEST: f64 = 0.6;
/// Room for a character.
const CHARACTER: f64 = 5.6;

/// A function, below those that called it.
#[derive(Debug, Default)]
struct Node {
    /// Samples of the function and its callees; and the same in the other profile.
    count: u64,
    before: u64,
    calls: BTreeMap<String, Node>,
}

impl Node {
    fn of(flame: &Flame) -> Node {
        let mut root = Node::default();
        let all = flame.stacks.iter().map(|(stack, count)| (stack, *count, 0));
        let before = flame.before.iter().map(|(stack, count)| (stack, 0, *count));
        for (stack, count, before) in all.chain(before) {
            let mut node = &mut root;
            node.count += count;
            node.before += before;
            for name in stack.split(';') {
                node = node.calls.entry(name.to_owned()).or_default();
                node.count += count;
                node.before += before;
            }
        }
        root
    }

    fn depth(&self, each: f64) -> usize {
        let is_drawn = |node: &&Node| node.count as f64 * each >= NARROWEST;
        let below = self.calls.values().filter(is_drawn).map(|node| node.depth(each));
        1 + below.max().unwrap_or(0)
    }
}

/// Draws a flamegraph; the text is a whole `svg` element.
pub fn draw(flame: &Flame) -> String {
    let root = Node::of(flame);
    let each = WIDTH / root.count.max(1) as f64;
    let rows = root.depth(each);
    let height = TOP + rows as f64 * ROW + 6.0;
    let title = escape(&flame.title);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"flame\" \
         viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\" \
         font-family=\"sans-serif\" font-size=\"10\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
         <text x=\"0\" y=\"16\" font-size=\"12\" font-weight=\"bold\">{title}</text>\n"
    );
    let picture = Picture { each, bottom: height - 6.0, root: &root, flame };
    picture.node(&mut out, &root, "all", 0.0, 0);
    out.push_str("</svg>\n");
    out
}

struct Picture<'a> {
    each: f64,
    bottom: f64,
    root: &'a Node,
    flame: &'a Flame,
}

impl Picture<'_> {
    fn node(&self, out: &mut String, node: &Node, name: &str, x: f64, row: usize) {
        let width = node.count as f64 * self.each;
        if width < NARROWEST {
            return;
        }
        let y = self.bottom - (row + 1) as f64 * ROW;
        let part = |count: u64, of: u64| count as f64 / of.max(1) as f64 * 100.0;
        let share = part(node.count, self.root.count);
        let mut text = format!("{name}: {share:.1} %");
        let fill = if self.flame.before.is_empty() {
            plain_colour(name)
        } else {
            let before = part(node.before, self.root.before);
            let _ = write!(text, ", before {before:.1} %");
            change_colour(share - before)
        };
        let _ = write!(
            out,
            "<g class=\"frame\"><title>{}</title><rect x=\"{x:.1}\" y=\"{y:.1}\" \
             width=\"{:.1}\" height=\"{:.1}\" fill=\"{fill}\"/>",
            escape(&text),
            (width - 0.3).max(0.3),
            ROW - 1.0
        );
        let room = ((width - 4.0) / CHARACTER) as usize;
        if room >= 3 {
            let shown = name.trim_end_matches(super::KERNEL_MARK);
            let shown: String = match shown.chars().count() <= room {
                true => shown.to_owned(),
                false => shown.chars().take(room - 2).chain("..".chars()).collect(),
            };
            let _ = write!(
                out,
                "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                x + 2.0,
                y + ROW - 4.5,
                escape(&shown)
            );
        }
        out.push_str("</g>\n");
        let mut x = x;
        for (name, called) in &node.calls {
            self.node(out, called, name, x, row + 1);
            x += called.count as f64 * self.each;
        }
    }
}

/// The kernel's functions are orange, the program's are blue; a name always has the same shade.
fn plain_colour(name: &str) -> String {
    let shade = name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31) + u32::from(byte)) % 40;
    match name.ends_with(super::KERNEL_MARK) {
        true => format!("#{:02x}{:02x}{:02x}", 230, 150 + shade, 60 + shade),
        false => format!("#{:02x}{:02x}{:02x}", 110 + shade, 175 + shade, 225),
    }
}

/// More than before is red, less is blue; the stronger, the more of all samples it is.
fn change_colour(points: f64) -> String {
    let pale = 255 - (points.abs() * 12.0).min(155.0) as u32;
    match points {
        0.05.. => format!("#ff{pale:02x}{pale:02x}"),
        ..=-0.05 => format!("#{pale:02x}{pale:02x}ff"),
        _ => "#f4f4f4".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flame(stacks: &[(&str, u64)], before: &[(&str, u64)]) -> Flame {
        let owned = |stacks: &[(&str, u64)]| {
            stacks.iter().map(|(stack, count)| ((*stack).to_owned(), *count)).collect()
        };
        Flame { title: "a < b".into(), stacks: owned(stacks), before: owned(before) }
    }

    #[test]
    fn boxes_are_as_wide_as_their_samples() {
        let stacks = [("udm;main;write_[k]", 75), ("udm;main;fast::copy", 25)];
        let svg = draw(&flame(&stacks, &[]));
        assert_eq!(svg.matches("class=\"frame\"").count(), 5, "{svg}");
        assert!(svg.contains("<title>write_[k]: 75.0 %</title>"), "{svg}");
        assert!(svg.contains("width=\"719.7\"") && svg.contains("width=\"239.7\""), "{svg}");
        assert!(svg.contains(">write</text>"), "{svg}");
        assert!(svg.contains("a &lt; b"));
        // Too narrow to be seen.
        let svg = draw(&flame(&[("a", 100_000), ("b", 1)], &[]));
        assert_eq!(svg.matches("class=\"frame\"").count(), 2, "{svg}");
        assert!(draw(&flame(&[], &[])).ends_with("</svg>\n"));
    }

    #[test]
    fn what_has_become_more_is_red_and_what_has_become_less_is_blue() {
        let svg = draw(&flame(&[("a", 30), ("b", 70)], &[("a", 3), ("b", 1)]));
        let fill = |name: &str| {
            let (_, rest) = svg.split_once(&format!("<title>{name}: ")).unwrap();
            rest.split("fill=\"").nth(1).unwrap()[..7].to_owned()
        };
        assert!(svg.contains("<title>a: 30.0 %, before 75.0 %</title>"), "{svg}");
        assert!(fill("a").ends_with("ff") && fill("b").starts_with("#ff"), "{svg}");
        assert_eq!(fill("all"), "#f4f4f4");
    }
}
