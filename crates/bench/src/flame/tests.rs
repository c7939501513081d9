//! Tests of recording: a case's own work is found in it, with its callers and the kernel's part.

use super::*;
use crate::cpu::of_thread;

/// Nanoseconds of processor time: others may take the processor meanwhile.
const BURNT: f64 = 400e6;

#[test]
fn lists_of_processors_are_understood() {
    assert_eq!(processors("0-3,5"), [0, 1, 2, 3, 5]);
    assert_eq!(processors("7"), [7]);
    assert!(processors("").is_empty() && processors("x-1,3-2").is_empty());
    assert!(processors("0-4294967295").len() <= 4096);
}

#[inline(never)]
fn burns_in_the_program() -> u64 {
    let (mut sum, until) = (1_u64, of_thread() + BURNT);
    while of_thread() < until {
        (0..100_000).for_each(|nth| sum = std::hint::black_box(sum.wrapping_mul(31) + nth));
    }
    sum
}

#[inline(never)]
fn burns_in_the_kernel() {
    let (mut bytes, until) = (vec![0; 1 << 20], of_thread() + BURNT);
    while of_thread() < until {
        // Numbers that the kernel calculates.
        let mut file = fs::File::open("/dev/urandom").unwrap();
        std::io::Read::read_exact(&mut file, &mut bytes).unwrap();
    }
}

#[test]
fn what_a_case_does_is_in_its_picture() {
    let recorder = match Recorder::start() {
        Ok(recorder) => recorder,
        Err(why) => return eprintln!("SKIPPED: no samples to be had: {why}"),
    };
    {
        let _case = case("one");
        std::thread::scope(|scope| scope.spawn(burns_in_the_program).join().unwrap());
    }
    {
        let _case = case("two");
        burns_in_the_kernel();
    }
    compare("one", "two");
    compare("one", "nothing");
    let mut study = Study::new("x", "x", "x");
    recorder.finish(&mut study);
    assert!(recording().is_none());
    study.flames.retain(|flame| flame.title != "x: everything else");
    let titles: Vec<&str> = study.flames.iter().map(|flame| flame.title.as_str()).collect();
    assert_eq!(titles, ["one", "two", "two, compared with one: red is more, blue is less"]);
    let part = |flame: &Flame, word: &str| {
        let all: u64 = flame.stacks.iter().map(|(_, count)| count).sum();
        let of = flame.stacks.iter().filter(|(stack, _)| stack.contains(word));
        of.map(|(_, count)| count).sum::<u64>() as f64 / all.max(1) as f64
    };
    let [one, two, _] = &study.flames[..] else { panic!("{titles:?}") };
    assert!(part(one, "burns_in_the_program") > 0.8, "{:?}", one.stacks);
    assert!(part(one, "burns_in_the_kernel") < 0.05, "{:?}", one.stacks);
    assert!(part(two, "burns_in_the_kernel") > 0.8, "{:?}", two.stacks);
    if study.notes.iter().all(|note| !note.contains("left out")) {
        assert!(part(two, KERNEL_MARK) > 0.5, "{:?}", two.stacks);
    }
    // A thread's stack is unwound to where it began.
    assert!(part(one, "thread") > 0.5, "{:?}", one.stacks);
    assert!(draw(two).contains("burns_in_the_kernel"));
}
