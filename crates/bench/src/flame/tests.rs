//! Tests of recording: a case's own work is found in it, with its callers and the kernel's part.

use std::time::Instant;

use super::*;

#[test]
fn lists_of_processors_are_understood() {
    assert_eq!(processors("0-3,5"), [0, 1, 2, 3, 5]);
    assert_eq!(processors("7"), [7]);
    assert!(processors("").is_empty() && processors("x-1,3-2").is_empty());
    assert!(processors("0-4294967295").len() <= 4096);
}

#[inline(never)]
fn burns_in_the_program(until: Instant) -> u64 {
    let mut sum = 1_u64;
    while Instant::now() < until {
        (0..1000).for_each(|nth| sum = std::hint::black_box(sum.wrapping_mul(31) + nth));
    }
    sum
}

#[inline(never)]
fn burns_in_the_kernel(until: Instant) {
    let mut bytes = vec![0; 1 << 20];
    while Instant::now() < until {
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
    let soon = || Instant::now() + Duration::from_millis(400);
    {
        let _case = case("one");
        std::thread::scope(|scope| scope.spawn(|| burns_in_the_program(soon())).join().unwrap());
    }
    {
        let _case = case("two");
        burns_in_the_kernel(soon());
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
